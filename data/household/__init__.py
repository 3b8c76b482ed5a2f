"""The household world: games as data, our driver, the stock engine, panels and a generator of games."""
