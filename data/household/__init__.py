"""The household world: games as data, our driver, the stock engine behind the same interface, panels and a generator."""
