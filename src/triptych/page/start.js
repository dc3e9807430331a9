// Builds the buttons of the header, then every section that has a script.

const tools = document.getElementById("tools");
mountTheme(tools);
const saveData = () => save(fileName(page.title, "data.json"), jsonBlob(page));
tools.append(button("Data", "Save everything this page shows as JSON", saveData));
if (page.sections.length > 1 && page.sections.some((section) => section.kind === "tab")) mountTabs(page.sections);
else mountAll(page.sections, "section");
repaint();
