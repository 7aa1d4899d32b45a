"""The rendezvous plug-in of torchrun and the agent's link to the coordinator."""
