"""A local page that shows runs while they grow (`novarl watch`), and the same as one file (`novarl report`).

Reads run directories (docs/run_directory.md) and writes nothing into them. Never loads torch.
"""
