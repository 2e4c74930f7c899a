"""Runs of other libraries as run directories: callbacks that write one while the library trains (`trl`, `openrlhf`),
and readers of the files that libraries leave behind (`readers`; `novarl import`).

What a source does not record stays absent. Nothing here loads torch or transformers when it is imported.
"""
