"""Other frameworks on the same steps: what is installed of them, on this machine, over loopback."""
