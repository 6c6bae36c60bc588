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

    document.addEventListener("keydown", onKey, true);
    document.addEventListener("input", onSearch, true);
})();
