"""KeyMap: names and shapes that differ between a state and what is stored.

Ask here: what does a rule do to a name, which stored boxes make up a mapped tensor.
"""
