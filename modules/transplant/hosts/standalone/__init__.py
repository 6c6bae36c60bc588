"""The built-in WebUI: what runs when Transplant runs alone."""
