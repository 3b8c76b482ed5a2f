"""The search world: questions, a corpus behind a retriever, and how answers are scored."""
