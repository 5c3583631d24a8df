"""DcpxWriter: a plan as rows, rows as files, files as a commit.

Ask here: how are items spread over files, where is the rename that commits, what is removed then.
"""
