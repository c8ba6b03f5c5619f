"""Every command of gyre. The only importer of click and rich; heavy rooms are imported inside the command that needs
them.
"""
