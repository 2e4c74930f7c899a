"""Models through Hugging Face transformers. Only this package imports transformers (`rendering` is a separate process),
and only inside functions: the import takes seconds."""
