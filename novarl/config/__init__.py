"""The configuration: one frozen, typed tree per kind of run, and how it is read."""
