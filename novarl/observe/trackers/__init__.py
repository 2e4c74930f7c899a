"""Experiment trackers as sinks: trackio, Weights & Biases, MLflow. They hear what a run reports and never affect it."""
