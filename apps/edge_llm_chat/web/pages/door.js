// The key stands behind the # of the link: it goes to the server once, and out of the address and the history at once.
async function enter() {
  const key = location.hash.slice(1);
  if (!key) return;
  history.replaceState(null, "", location.pathname);
  const answer = await fetch("enter", { method: "POST", body: key });
  if (answer.ok) location.replace(location.pathname);
  else document.getElementById("say").textContent = "This link was used already, or is an old one. Look for the last one that was printed.";
}
window.addEventListener("hashchange", enter); // a link that is opened while this page is here does not load it again
enter();
