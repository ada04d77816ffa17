"""Around a training loop: state on disk, data for every rank, and failures.

Nothing in seqcomp imports this package; its files stand beside each other and can be used alone.
"""
