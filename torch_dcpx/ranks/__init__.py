"""Lets ranks agree, vote, and send plans to each other.

Ask here: what does a rank learn when another fails or ends, which call does a rank make, how long
does a wait last, how is a commit decided while training goes on.
"""
