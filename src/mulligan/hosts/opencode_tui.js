// Mulligan's plugin for the screen of opencode: /undo and /redo at one Enter, above opencode's own entries of that name.
// The server plugin (opencode.js) answers them.
const COMMANDS = [["undo", "Undo the agent's last change (Mulligan)"], ["redo", "Redo what was undone last (Mulligan)"]]

export default {
  id: "mulligan",
  tui: async (api) => {
    const run = (verb) => async () => {
      const sessionID = api.route.current.params?.sessionID
      if (!sessionID) return api.ui.toast({ message: "Mulligan: open a session first.", variant: "info" })
      // The server plugin stops the command after its answer, which is an error here.
      await api.client.session.command({ sessionID, command: "mulligan", arguments: verb }).catch(() => {})
    }
    const commands = COMMANDS.map(([verb, title]) => ({
      name: `mulligan.${verb}`, title, desc: title, namespace: "palette", slashName: verb, run: run(verb),
    }))
    api.keymap.registerLayer({ priority: 1000, commands })
  },
}
