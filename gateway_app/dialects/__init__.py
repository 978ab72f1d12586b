"""One class a provider API: parse a request, render a response, stream it, shape an error. May import ``schemas``."""
