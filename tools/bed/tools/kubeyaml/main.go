// Prints what Kubernetes' reader makes of each YAML text in the JSON list on its standard input.
//
// kubectl and controllers read manifests with sigs.k8s.io/yaml, which turns YAML into JSON; the API server then
// reads that JSON with sigs.k8s.io/json. Each answer is the JSON that the API server would store, or the error.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	kubejson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

type answer struct {
	Text  string          `json:"text"`
	Value json.RawMessage `json:"value,omitempty"`
	Error string          `json:"error,omitempty"`
}

func main() {
	var texts []string
	if err := json.NewDecoder(os.Stdin).Decode(&texts); err != nil {
		fmt.Fprintln(os.Stderr, "kubeyaml:", err)
		os.Exit(1)
	}
	answers := make([]answer, len(texts))
	for index, text := range texts {
		answers[index] = read(text)
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		fmt.Fprintln(os.Stderr, "kubeyaml:", err)
		os.Exit(1)
	}
}

func read(text string) answer {
	// Strict, as kubectl asks for: a key that is given twice is an error.
	sent, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		return answer{Text: text, Error: err.Error()}
	}
	var value any
	if err := kubejson.UnmarshalCaseSensitivePreserveInts(sent, &value); err != nil {
		return answer{Text: text, Error: err.Error()}
	}
	stored, err := json.Marshal(value)
	if err != nil {
		return answer{Text: text, Error: err.Error()}
	}
	return answer{Text: text, Value: stored}
}
