class OptionInfo:
    def __init__(
        self, default=None, label="", component=None, component_args=None, onchange=None, section=None, refresh=None,
        folder=False, submit=None, comment_before="", comment_after="", category_id=None, *args, **kwargs,
    ):  # fmt: skip
        self.default, self.label, self.component, self.component_args = default, label, component, component_args
        self.onchange, self.section, self.refresh, self.comment_after = onchange, section, refresh, comment_after

    def info(self, text):
        self.comment_after += f"<span class='info'>({text})</span>"
        return self


class Options:
    def __init__(self, labels):
        super().__setattr__("data_labels", labels)
        super().__setattr__("data", {})

    def __getattr__(self, name):
        if name in self.data:
            return self.data[name]
        if name in self.data_labels:
            return self.data_labels[name].default
        raise AttributeError(name)

    def __setattr__(self, name, value):
        if name not in self.data_labels:
            return super().__setattr__(name, value)
        self.data[name] = value
        return None

    def set(self, key, value):
        """As a POST to /sdapi/v1/options and the dropdowns do: neither type nor choices are checked."""
        before = getattr(self, key)
        if before == value:
            return False
        self.data[key] = value
        onchange = self.data_labels[key].onchange
        if onchange is not None:
            try:
                onchange()
            except Exception:
                self.data[key] = before
                return False
        return True

    def onchange(self, key, function, call=True):
        self.data_labels[key].onchange = function
        if call:
            function()

    def add_option(self, key, info):
        self.data_labels[key] = info
