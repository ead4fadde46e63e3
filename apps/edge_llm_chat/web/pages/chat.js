// textual.js connects when all is loaded, to where the element says.
const place = location.origin.replace(/^http/, "ws") + location.pathname;
document.getElementById("terminal").dataset.sessionWebsocketUrl = place + "ws";
document.getElementById("again").addEventListener("click", () => location.reload());
// Keys go to the chat at once, and again whenever somebody comes back to the page; textual.js has made the terminal by then.
const write = () => document.querySelector(".xterm-helper-textarea")?.focus();
window.addEventListener("load", write);
window.addEventListener("focus", write);
