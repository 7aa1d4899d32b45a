"""The commands for a cluster. They use a plain kubeconfig, import the official client only when a command
runs, and never import torch."""
