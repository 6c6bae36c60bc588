// In SD.Next alone: a refusal stays over the page until it is closed or read.
(() => {
    "use strict";
    if (typeof window.onUiLoaded !== "function") return;

    const mark = "\u2063"; // ends our messages, and is not seen
    const seconds = 20;

    // Gradio 3 takes a message away when the dropdown that caused it changes again, which it does at once: it goes back
    // to what is loaded. So the message is shown here instead.
    function keep(toast) {
        const text = toast.querySelector(".toast-text")?.textContent ?? toast.textContent;
        if (!text.includes(mark)) return;
        toast.style.display = "none";
        document.getElementById("transplant_over")?.remove();
        const shown = Object.assign(document.createElement("div"), { id: "transplant_over", className: "tp-message tp-error" });
        const close = Object.assign(document.createElement("button"), { textContent: "×", title: "Close" });
        shown.setAttribute("role", "alert");
        close.addEventListener("click", () => shown.remove());
        shown.append(close, text.replaceAll(mark, "").trim());
        document.body.append(shown);
        setTimeout(() => shown.remove(), seconds * 1000);
    }

    function onChange(changes) {
        for (const { addedNodes } of changes) {
            for (const node of addedNodes) {
                if (node.nodeType !== Node.ELEMENT_NODE) continue;
                const toasts = node.matches(".toast-body") ? [node] : node.querySelectorAll(".toast-body");
                for (const toast of toasts) keep(toast);
            }
        }
    }

    new MutationObserver(onChange).observe(document.documentElement, { childList: true, subtree: true });
})();
