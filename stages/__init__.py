"""One module per stage of an RSIPO iteration, and the pieces the stages share."""
