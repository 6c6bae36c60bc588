// What the page needs beyond Gradio. In an SD.Next-style host, which has these itself, it does nothing.
(() => {
    "use strict";
    if (typeof window.onUiLoaded === "function") return;

    const buttons = { txt2img_prompt: "txt2img_generate", txt2img_neg_prompt: "txt2img_generate", compare_prompts: "compare_start" };

    // Ctrl+Enter in a prompt begins, Escape there ends what is being done.
    function onKey(event) {
        const id = Object.keys(buttons).find((name) => event.target.closest?.(`#${name}`));
        if (!id) return;
        const begins = event.key === "Enter" && (event.ctrlKey || event.metaKey);
        const button = document.getElementById(begins ? buttons[id] : event.key === "Escape" ? "transplant_cancel" : "");
        if (!button || button.offsetParent === null) return;
        event.preventDefault();
        setTimeout(() => button.click(), 50); // Gradio takes up the text first
    }

    // Shows the settings in whose text every word is found; a section without any loses its title too.
    function onSearch(event) {
        if (!event.target.closest?.("#settings_search")) return;
        const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
        const shows = (element) => words.every((word) => `${element.id} ${element.textContent}`.toLowerCase().includes(word));
        for (const section of document.querySelectorAll(".tp-section")) {
            const settings = [...section.querySelectorAll("[id^=setting_]")];
            for (const setting of settings) setting.classList.toggle("tp-not-found", !shows(setting));
            const isEmpty = settings.every((setting) => setting.classList.contains("tp-not-found"));
            section.previousElementSibling?.classList.toggle("tp-not-found", isEmpty);
        }
    }

    // What is done, for screen readers: they hear a change of text in a region that was there before, and Gradio puts
    // a new one in the place of the old. Once for each job, not for every step of it, and once for what came of it, in
    // the same words too where it is another job's.
    let heard = "";
    const told = Object.assign(document.createElement("div"), { id: "transplant_told", className: "tp-spoken" });
    told.setAttribute("role", "status");

    // Gradio leaves a button around the comparison without a name, gives the name of a text that cannot be edited to its
    // copy button, and names what is empty without saying what it is.
    const unnamed = "#compare_result .image-container > button:not([aria-label])";
    const texts = ["txt2img_info", "compare_info", "transplant_log"];
    const empty = "#txt2img_gallery .empty:not([role]), #compare_result .empty:not([role])";

    function onChange() {
        if (!told.isConnected) document.body?.append(told);
        const now = document.querySelector("#transplant_progress [data-told]")?.dataset;
        if (now && heard !== `${now.job} ${now.told}`) {
            heard = `${now.job} ${now.told}`;
            told.textContent = now.told;
        }
        for (const button of document.querySelectorAll(unnamed)) button.setAttribute("aria-label", "The comparison");
        for (const id of texts) {
            const text = document.querySelector(`#${id} textarea:not([aria-label])`);
            text?.setAttribute("aria-label", document.querySelector(`#${id} [data-testid=block-info]`)?.textContent.trim() ?? "");
        }
        for (const place of document.querySelectorAll(empty)) {
            place.setAttribute("role", "note");
            place.setAttribute("aria-label", "No picture yet");
        }
    }

    new MutationObserver(onChange).observe(document.documentElement, { childList: true, subtree: true });
    document.addEventListener("keydown", onKey, true);
    document.addEventListener("input", onSearch, true);
})();
