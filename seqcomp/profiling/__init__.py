"""What this machine can do, measured: its links and kernels, written as a cluster file."""
