"""Machines as data: devices, links and clusters, each number with its source."""
