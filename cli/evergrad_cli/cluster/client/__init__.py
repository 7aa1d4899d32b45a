"""The client of the API server: requests, errors, port forwarding, and the arguments that name a cluster."""
