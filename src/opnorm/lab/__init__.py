"""Everything with side effects: the command line, data, training, reports. Needs `pip install "opnorm[lab]"`."""
