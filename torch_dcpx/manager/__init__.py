"""CheckpointManager: the checkpoints of one training, resume, retention, preemption.

Ask here: which checkpoint is the newest, which one goes, which ones does a resume pass over.
"""
