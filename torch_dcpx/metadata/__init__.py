"""The `.metadata` file, ours and stock's: encoding, decoding, checks.

Ask here: what does the file hold, how are a million entries opened at once, what is refused.
"""
