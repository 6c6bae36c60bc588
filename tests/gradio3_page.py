"""Our tab on a page of gradio 3.43.2, in the stand-in for SD.Next: the stand-in's folder is the current one.

    PYTHON gradio3_page.py SITE_PACKAGES PORT

gradio and what it needs come from PYTHON's own environment, the rest from SITE_PACKAGES, last on sys.path.
"""

import os
import sys

sys.path[:0] = [os.getcwd(), *os.environ["TEST_PATHS"].split(os.pathsep)]
sys.path.append(sys.argv[1])

import gradio as gr  # noqa: E402
import webui  # noqa: E402

assert gr.__version__ == "3.43.2" and gr.__file__.startswith(sys.prefix)
_, tabs = webui.start()

with gr.Blocks(analytics_enabled=False) as page, gr.Tabs():
    with gr.TabItem("Text"):
        gr.Markdown("the host's own")
    for blocks, title, elem_id in tabs:
        with gr.TabItem(title, id=elem_id, elem_id=f"tab_{elem_id}"):
            blocks.render()
page.queue().launch(server_name="127.0.0.1", server_port=int(sys.argv[2]), show_api=False, quiet=True)
