// The key stands behind the # of the link: it goes to the server once, and out of the address and the history at once.
const key = location.hash.slice(1);
if (key) {
  history.replaceState(null, "", location.pathname);
  fetch("enter", { method: "POST", body: key }).then((answer) => {
    if (answer.ok) location.replace(location.pathname);
    else document.getElementById("say").textContent = "This link was used already, or is an old one. Look for the last one that was printed.";
  });
}
