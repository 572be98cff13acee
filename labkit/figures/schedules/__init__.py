"""What schedules send and hold, and what that costs: traces, counts, pipelines, predictions."""
