"""Measurements that others published, each with what the cost model predicts for it."""
