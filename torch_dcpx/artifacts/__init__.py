"""`export` and `load_pretrained`: models as other tools want them.

Ask here: which formats there are, which rank writes which box, where the bytes come from.
"""
