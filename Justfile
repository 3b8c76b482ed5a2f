set shell := ["bash", "-euo", "pipefail", "-c"]

python := "python"

# The test suite without the heavy checks.
test *args:
    {{python}} -m pytest -q {{args}}

# The heavy checks.
slow *args:
    {{python}} -m pytest -q -m slow {{args}}

lint:
    {{python}} -m ruff check .
    {{python}} -m ruff format --check .

format:
    {{python}} -m ruff check --fix .
    {{python}} -m ruff format .

# Three steps of RSIPO with the bundled policy.
demo run="runs/demo":
    {{python}} -m rsipo_cli loop --preset household-tiny --steps 3 --run {{run}}

# A source archive and a wheel in dist/.
build:
    {{python}} -m build
