"""Our tab on a page of gradio 3.43.2, in the stand-in for SD.Next: the stand-in's folder is the current one.

    PYTHON gradio3_page.py SITE_PACKAGES PORT

gradio and what it needs come from PYTHON's own environment, the rest from SITE_PACKAGES, last on sys.path.
"""

import importlib
import os
import sys

sys.path[:0] = [os.getcwd(), *os.environ["TEST_PATHS"].split(os.pathsep)]
sys.path.append(sys.argv[1])

import gradio as gr  # noqa: E402
import webui  # noqa: E402

assert gr.__version__ == "3.43.2" and gr.__file__.startswith(sys.prefix)
_, tabs = webui.start()
notices = importlib.import_module("transplant.hosts.sdnext.notices")


def refuse(value: str):
    """As the host's own: a choice that is not taken goes back, which is a change of its own."""
    if value != "Default":
        notices.refuse("primary", f"{value}: is refused.")
    return gr.update(value="Default")


with gr.Blocks(analytics_enabled=False) as page, gr.Tabs():
    with gr.TabItem("Text"):
        unet = gr.Dropdown(["Default", "other"], value="Default", label="UNET model", elem_id="setting_sd_unet")
        unet.change(refuse, unet, unet)
    for blocks, title, elem_id in tabs:
        with gr.TabItem(title, id=elem_id, elem_id=f"tab_{elem_id}"):
            blocks.render()
page.queue().launch(server_name="127.0.0.1", server_port=int(sys.argv[2]), show_api=False, quiet=True)
