"""Files that the library itself runs in a process that can be killed, as it runs a user's reward file.

They are in a folder of their own because the process puts a file's folder first on its module path.
"""
