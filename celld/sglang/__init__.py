"""Starting the real engine, SGLang 0.5.23: its settings, its environment, and what a machine without a GPU needs."""
