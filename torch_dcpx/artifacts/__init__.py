"""`export`, `load_pretrained`, `load_tensors`: models and tensors as other tools want them.

Ask here: which formats there are, which rank writes which box, where the bytes come from, how a
tensor is read by its name alone.
"""
