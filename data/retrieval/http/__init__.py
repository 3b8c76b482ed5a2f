"""Retrieval over HTTP by the Search-R1 protocol: a server of one index, and a client of any server."""
