"""CheckpointManager: the checkpoints of one training, resume, retention, preemption.

Ask here: which checkpoint is the newest, which one goes, what does a resume pass over.
"""
