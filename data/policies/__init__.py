"""Small real policies that ship with the package, and the script that trains them from generated demonstrations."""
