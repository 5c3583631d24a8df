"""`verify` and `repair`: what is wrong with a checkpoint, and what is made of what is left.

Ask here: what is compared with what, which findings there are, when is repair refused.
"""
