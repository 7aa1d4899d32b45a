"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow and Aim, through their own libraries."""
