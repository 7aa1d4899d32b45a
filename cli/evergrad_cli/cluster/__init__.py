"""The commands for a cluster: plain kubeconfig, the official client imported only when one of them runs,
never torch."""
