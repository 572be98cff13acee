"""The part of labkit that runs on each rank: training, checkpoints, verification, inference."""
