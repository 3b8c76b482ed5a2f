"""The `rsipo` command line: parse options, call one `run(...)`, print the result."""
