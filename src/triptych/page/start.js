// Builds the buttons of the header, then every section that has a script.

const tools = document.getElementById("tools");
mountTheme(tools);
tools.append(button("Data", "Save everything this page shows as JSON", () => saveJson(fileName(page.title, "data.json"), page)));
if (page.sections.length > 1 && page.sections.some((section) => section.kind === "tab")) mountTabs(page.sections);
else mountAll(page.sections, "section");
repaint();
