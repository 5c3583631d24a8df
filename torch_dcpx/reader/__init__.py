"""DcpxReader, and the files that it reads: ours, stock's, safetensors.

Ask here: where does an item lie, is what is wanted stored once, which reads may go together.
"""
