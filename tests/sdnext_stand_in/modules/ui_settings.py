def create_ui():
    """The settings page: an option without a section ends the server."""
    from modules import script_callbacks, shared

    script_callbacks.call("ui_settings")
    sections = {}
    for key, item in shared.opts.data_labels.items():
        section_id, title = item.section  # a TypeError where it is None
        if sections.setdefault(section_id, title) != title:
            raise ValueError(f"{key}: the section {section_id} has two titles")
    return [key for key in shared.opts.quicksettings_list if key in shared.opts.data_labels]
