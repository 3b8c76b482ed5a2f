"""Indexes: corpora of passages read in a stream, and directories that are built from them, whole or not at all."""
