"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow and Aim, by their own libraries."""
